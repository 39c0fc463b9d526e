/* The message of the latest error, kept for each thread, so that Python can raise it with its own types. */

#include <stdarg.h>
#include <stdio.h>

#include "board.h"
#include "internal.h"

static __thread char message[256];

const char *board_error(void) {
    return message;
}

int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return code;
}
