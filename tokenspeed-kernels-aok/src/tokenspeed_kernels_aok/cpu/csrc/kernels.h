// Declarations of every kernel in the namespace of the instruction set that is being compiled.
#pragma once

#include "abi.h"

#define AOK_CONCAT_(a, b) a##b
#define AOK_CONCAT(a, b) AOK_CONCAT_(a, b)
#define AOK_TABLE AOK_CONCAT(kernels_, AOK_NS)

namespace aok::AOK_NS {

#define AOK_DECLARE(name, Args) void name(const Args*);
AOK_KERNELS(AOK_DECLARE)
#undef AOK_DECLARE

}  // namespace aok::AOK_NS
