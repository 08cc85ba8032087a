"""Stand-in folder: on sys.path, so that processes which multiprocessing starts can import `horovod`."""
