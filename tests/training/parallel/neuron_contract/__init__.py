"""What neuronx_distributed documents about the calls that training.parallel.neuron makes.

Not the library: only names, arguments and what they compute, over gloo, so that a call with another
name or argument fails. It says nothing about what the library does on a device.
"""
