#include "device.h"
#include "experts_few.h"

EACH_QUANT(EXPERTS_FEW)
EACH_FLOAT(EXPERTS_FEW_FLOAT)
