#include <gdrapi.h>

int gdr_open(void)
{
    return 0;
}
