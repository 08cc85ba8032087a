"""Ways into a training loop: DDP, a loop of one's own, Horovod's optimizer."""
