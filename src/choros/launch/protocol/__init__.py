"""The protocol between the driver and the wrappers: frames, options and packed calls."""
