"""What says where an elastic job may run."""
