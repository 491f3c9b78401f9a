#include "device.h"
#include "experts_many.h"

EACH_QUANT(EXPERTS_MANY_OF)
EACH_FLOAT(EXPERTS_MANY_OF)
