"""Start a sqsh: enroot where it is installed, else namespaces, mounts and a pivot of our own.

`run` gives a command the same surroundings either way: the image's environment over the host's,
its working folder and entrypoint by /etc/rc, the host's devices, network and processes, a
writable root that is forgotten at the end. The calling process becomes the command, so that its
exit code and the signals that Slurm sends are the command's own.
"""
