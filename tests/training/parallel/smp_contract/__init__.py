"""The documented interface of SMP v2's library, as a contract: NOT the library, and no proof of it.

`sagemaker` stands in for torch.sagemaker. Its functions have the names, arguments and defaults of
the library's reference ("SageMaker model parallel library v2 reference", AWS documentation), refuse
what it does not name, and record how they were called. They do the least that lets a run continue:
no layer is transformed, no ranks share one, and sharding is torch's own FSDP1. A run that passes
shows that the interface is called as documented, and nothing about the library.
"""
