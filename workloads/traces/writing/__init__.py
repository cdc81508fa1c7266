"""What writers share: whole files, what is lost, chains as rows of requests."""
