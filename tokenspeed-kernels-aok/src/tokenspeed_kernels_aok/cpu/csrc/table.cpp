// The kernels of one instruction set, as the table that dispatch.cpp hands out.
#include "kernels.h"

namespace aok {

extern const KernelTable AOK_TABLE;
const KernelTable AOK_TABLE = {
#define AOK_ENTRY(name, Args) AOK_NS::name,
    AOK_KERNELS(AOK_ENTRY)
#undef AOK_ENTRY
};

}  // namespace aok
