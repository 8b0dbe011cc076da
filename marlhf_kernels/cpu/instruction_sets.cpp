#include "api.h"

#ifdef MARLHF_X86_SETS
#include <cpuid.h>
#endif

// The instruction sets that the kernels are compiled for and this processor has: a bit each, in the order baseline,
// avx2, avx512.
MARLHF_EXPORT int marlhf_instruction_sets() {
    int sets = 1;
#ifdef MARLHF_X86_SETS
    unsigned eax, ebx, ecx, edx;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    __builtin_cpu_init();
    if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        sets |= 2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            sets |= 4;
    }
#endif
    return sets;
}
