/* Threads that work on one pass together and sleep between passes. */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H
#include <stdint.h>

typedef struct team team;

/* `threads` in all: the caller of team_run is one of them. NULL where they cannot be had. */
team *team_alloc(int32_t threads);
void team_free(team *t);

/* work(shared, thread) on every thread; returns when all have returned. */
void team_run(team *t, void (*work)(void *, int32_t), void *shared);

/* Within team_run: nobody goes on before all have come here. The last to come calls `then` first, while the others wait. */
void team_meet(team *t, void (*then)(void *), void *shared);
#endif
