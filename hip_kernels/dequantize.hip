#include "device.h"
#include "dequantize.h"

EACH_QUANT(DEQUANTIZE)
EACH_FLOAT(DEQUANTIZE)
