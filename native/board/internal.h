/* What the sources share and nobody outside sees. */
#ifndef OUTRIDER_INTERNAL_H
#define OUTRIDER_INTERNAL_H

/* Of one family, each has all that the one before has. */
enum isa { ISA_SCALAR, ISA_AVX2, ISA_AVX512, ISA_NEON, ISA_DOTPROD };

/* The set in use: what each source chooses its functions by. */
enum isa isa(void);

/* Keep the message for `board_error`, and return `code`. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
