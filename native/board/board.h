/* What the board's library offers: read by the compiler and, as it stands, by cffi. Only plain declarations;
 * lines that begin with a # are the compiler's alone. Arrays are dense, shapes stand in brackets. */
#ifndef OUTRIDER_BOARD_H
#define OUTRIDER_BOARD_H
#include <stdint.h>
#pragma GCC visibility push(default)

/* Why the latest call on this thread that returned an error did so: one clause, valid until the next one. */
const char *board_error(void);

/* Take an instruction set by its name (scalar, avx2, avx512, neon, dotprod), or the best there is for NULL.
 * 0, or -1 where this processor or this build has no such set. Not while another thread is in the library. */
int board_use(const char *name);

/* The name of the set that is in use. */
const char *board_isa(void);

#pragma GCC visibility pop
#endif
