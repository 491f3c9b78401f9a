#include "device.h"
#include "pack.h"

EACH_QUANT(PACK)
EACH_FLOAT(PACK_FLOAT)
