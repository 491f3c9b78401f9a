// The whole native library in one translation unit, so that SIMDe is parsed once.
#include "attention.cpp"
#include "linear.cpp"
#include "program.cpp"
#include "quantise.cpp"
#include "repack.cpp"
#include "rowops.cpp"
#include "team.cpp"
