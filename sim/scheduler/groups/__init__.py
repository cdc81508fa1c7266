"""What the schedulers of sequence groups share."""
