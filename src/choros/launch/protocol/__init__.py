"""What the driver and the wrappers say to each other."""
