#include <hwloc.h>
#include <rdma/fabric.h>

const char version[] = "NET/OFI Initializing aws-ofi-nccl " PACKAGE_VERSION;

int start(void)
{
    hwloc_topology_t topology;
    return fi_getinfo() + hwloc_topology_init(&topology);
}
