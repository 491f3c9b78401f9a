#include "device.h"
#include "linear_many.h"

EACH_QUANT(LINEAR_MANY_OF)
EACH_FLOAT(LINEAR_MANY_OF)
