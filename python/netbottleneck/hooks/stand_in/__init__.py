"""A folder that is put on sys.path, so that Horovod's name is found in processes that multiprocessing starts."""
