/* Which instructions the processor has, found out where the library runs: one build is for all boards of a kind. */

#include <stddef.h>
#include <string.h>

#include "board.h"
#include "internal.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
enum { HWCAP_DOT_PRODUCT = 1 << 20 };
#endif

static const char *const names[] = {"scalar", "avx2", "avx512", "neon", "dotprod"};
enum { SETS = sizeof names / sizeof *names, UNKNOWN = -1 };

static int is_there(enum isa set) {
    switch (set) {
    case ISA_SCALAR:
        return 1;
#if defined(__x86_64__)
    case ISA_AVX2: /* those that have it convert half precision too */
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
            && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    case ISA_NEON:
        return 1;
    case ISA_DOTPROD:
#if defined(__linux__)
        return (getauxval(AT_HWCAP) & HWCAP_DOT_PRODUCT) != 0;
#else
        return 1; /* Apple's all have it */
#endif
#endif
    default:
        return 0;
    }
}

static int used = UNKNOWN;

int board_use(const char *name) {
    for (int set = SETS - 1; set >= 0; set--)
        if ((name == NULL || strcmp(name, names[set]) == 0) && is_there(set)) {
            used = set;
            return 0;
        }
    return fail(-1, "this processor, or this build, has no instruction set named %s", name);
}

enum isa isa(void) {
    if (used == UNKNOWN)
        board_use(NULL);
    return used;
}

const char *board_isa(void) {
    return names[isa()];
}
