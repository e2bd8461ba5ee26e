"""Mamba-2 as AWS's Neuron system spreads it: tensor groups, and ZeRO-1 over those that read data.

Every rank holds plain tensors, its own heads and its own words of the vocabulary, which is what an
XLA device takes. The same code runs on Neuron devices (xla), on GPUs (nccl) and on CPUs (gloo).

    layers, nxd      the layers that ranks share: ours, and neuronx_distributed's
    loss             the loss where each rank has its own words of the vocabulary
    model            Mamba-2 made of such layers
    places, boxes    where a rank's part lies in a parameter of the whole; checkpoints of parts
    optimizer        AdamW with float32 master weights, shared by ranks (ZeRO-1) or not
    device           joining the other ranks
    backend          what the training loop calls
"""
