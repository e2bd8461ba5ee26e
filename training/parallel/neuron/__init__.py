"""Mamba-2 as AWS's Neuron system spreads it: tensor groups, and ZeRO-1 over data-parallel ranks.

Every rank holds plain tensors, for its own heads and its own words of the vocabulary, as XLA
devices require. The same code runs on Neuron devices (xla), on GPUs (nccl) and on CPUs (gloo).

    layers, nxd      the layers that ranks share, and their loss: ours, and neuronx_distributed's
    model            Mamba-2 made of such layers places           where a rank's part lies in a
    parameter of the whole model optimizer        AdamW with float32 master weights, sharded
    (ZeRO-1) or not; checkpoints of parts device           joining the other ranks environment
    what Neuron's compiler and runtime read of the environment backend          what the training
    loop calls
"""
