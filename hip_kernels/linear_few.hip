#include "device.h"
#include "linear_few.h"

EACH_QUANT(LINEAR_FEW_OF)
EACH_FLOAT(LINEAR_FEW_OF_FLOAT)
