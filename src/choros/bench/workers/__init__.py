"""What contenders' processes run: a file for each way to do the same work. ``choros bench`` starts them."""
