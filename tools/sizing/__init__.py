"""Programs that check the estimate of memory."""
