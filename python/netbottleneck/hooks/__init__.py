"""Hooks into a training loop: DDP, Horovod's optimizer, the user's own loop, callbacks of frameworks."""
