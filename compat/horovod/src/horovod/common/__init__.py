"""What all frameworks share in Horovod."""
