"""Block tables and a block pool by runs of blocks."""
