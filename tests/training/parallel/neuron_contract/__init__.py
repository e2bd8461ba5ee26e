"""A record of what neuronx_distributed documents of the calls that training.parallel.neuron makes.

Not the library: names, arguments and what they compute, over gloo, so that a call of another name
or argument fails. What the library does on a device is not known from it.
"""
