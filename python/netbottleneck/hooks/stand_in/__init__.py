"""Stand-in folder on sys.path, so that processes started by multiprocessing can import `horovod`."""
