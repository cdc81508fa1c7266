"""Parts that the schedulers of sequence groups share."""
