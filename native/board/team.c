/* Why C: a pass meets some hundred times, so a meeting may take a microsecond. Threads wait for each other by looking
 * again and again for a few microseconds, then in the kernel: on a busy board the one that they wait for may need the
 * core that they look from. */
#define _GNU_SOURCE
#include "team.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LOOKS = 2000 };

struct team {
    int32_t threads;
    int32_t here;          /* have come to the meeting */
    uint32_t meeting;      /* how many meetings there were */
    uint32_t call;         /* how many runs there were */
    int32_t asleep;        /* wait in the kernel for `meeting` */
    int32_t ending;
    void (*work)(void *, int32_t);
    void *shared;
    pthread_t *thread; /* [threads - 1] */
};

typedef struct {
    team *of;
    int32_t number;
} member;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void sleep_while(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void team_meet(team *t, void (*then)(void *), void *shared) {
    const uint32_t meeting = __atomic_load_n(&t->meeting, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&t->here, 1, __ATOMIC_ACQ_REL) == t->threads) {
        if (then)
            then(shared);
        t->here = 0;
        __atomic_store_n(&t->meeting, meeting + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->asleep, __ATOMIC_SEQ_CST))
            wake(&t->meeting);
        return;
    }
    for (int look = 0; look < LOOKS; look++, relax())
        if (__atomic_load_n(&t->meeting, __ATOMIC_ACQUIRE) != meeting)
            return;
    __atomic_add_fetch(&t->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&t->meeting, __ATOMIC_SEQ_CST) == meeting)
        sleep_while(&t->meeting, meeting);
    __atomic_sub_fetch(&t->asleep, 1, __ATOMIC_SEQ_CST);
}

static void *live(void *argument) {
    member self = *(member *)argument;
    free(argument);
    team *t = self.of;
    for (uint32_t call = 0;; call++) {
        while (__atomic_load_n(&t->call, __ATOMIC_ACQUIRE) == call)
            sleep_while(&t->call, call);
        if (t->ending)
            return NULL;
        t->work(t->shared, self.number);
        team_meet(t, NULL, NULL);
    }
}

void team_run(team *t, void (*work)(void *, int32_t), void *shared) {
    t->work = work;
    t->shared = shared;
    if (t->threads > 1) {
        __atomic_add_fetch(&t->call, 1, __ATOMIC_RELEASE);
        wake(&t->call);
    }
    work(shared, 0);
    team_meet(t, NULL, NULL);
}

team *team_alloc(int32_t threads) {
    team *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->thread = calloc((size_t)threads, sizeof *t->thread);
    t->threads = 1;
    while (t->thread && t->threads < threads) {
        member *self = malloc(sizeof *self);
        if (self)
            *self = (member){t, t->threads};
        if (!self || pthread_create(&t->thread[t->threads - 1], NULL, live, self)) {
            free(self);
            break;
        }
        t->threads++;
    }
    if (t->threads < threads) {
        team_free(t);
        return NULL;
    }
    return t;
}

void team_free(team *t) {
    if (!t)
        return;
    t->ending = 1;
    __atomic_add_fetch(&t->call, 1, __ATOMIC_RELEASE);
    wake(&t->call);
    for (int32_t i = 0; i < t->threads - 1; i++)
        pthread_join(t->thread[i], NULL);
    free(t->thread);
    free(t);
}
