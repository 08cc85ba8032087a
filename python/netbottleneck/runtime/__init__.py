"""Communicators and their operations, the measured session, host counters and Horovod's timeline."""
