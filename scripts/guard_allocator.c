/* Loaded before libc: while guard(1) is in force, every block of malloc ends at a page that cannot
   be touched. Freed blocks cannot be touched either. Bytes around a block are compared when it is
   freed. Used by scripts/torch_heap.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define SPACE (1ul << 40) /* addresses, which are never used twice */
#define FILL 0xA5

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_memalign(size_t, size_t);

struct head { size_t size; unsigned char *start; }; /* on a page before the block's first */

static unsigned char *space, *next_page;
static volatile int on;

void guard(int wanted) {
    if (!space) {
        space = mmap(0, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        next_page = space;
    }
    on = wanted;
}

static int is_ours(const void *p) {
    return space && (unsigned char *)p >= space && (unsigned char *)p < space + SPACE;
}

static int is_guarded(size_t size) { return on && size >= 64 && size <= 64ul << 20; }

static unsigned char *first_page(void *p) {
    return (unsigned char *)((uintptr_t)p & ~(PAGE - 1));
}

static void *give(size_t align, size_t size) {
    if (align < 16) align = 16;
    size_t room = (size + align - 1) / align * align, pages = (room + PAGE - 1) / PAGE;
    unsigned char *base = __atomic_fetch_add(&next_page, (pages + 2) * PAGE, __ATOMIC_SEQ_CST);
    mprotect(base, (pages + 1) * PAGE, PROT_READ | PROT_WRITE);
    memset(base + PAGE, FILL, pages * PAGE);
    struct head *head = (struct head *)base;
    head->size = size;
    head->start = base + (pages + 1) * PAGE - room;
    return head->start;
}

static void compare(unsigned char *from, unsigned char *to, const char *where, size_t size) {
    for (unsigned char *q = from; q < to; q++)
        if (*q != FILL) {
            dprintf(2, "guard: memory %s a block of %zu bytes was written\n", where, size);
            abort();
        }
}

static void take(void *p) {
    unsigned char *first = first_page(p), *end, *stop;
    struct head *head = (struct head *)(first - PAGE);
    if (head->start != p) abort();
    end = (unsigned char *)p + head->size;
    stop = first_page(end + PAGE - 1);
    compare(first, p, "before", head->size);
    compare(end, stop, "behind", head->size);
    madvise(first - PAGE, stop - first + PAGE, MADV_DONTNEED);
    mprotect(first - PAGE, stop - first + PAGE, PROT_NONE);
}

void *malloc(size_t n) { return is_guarded(n) ? give(16, n) : __libc_malloc(n); }

void free(void *p) {
    if (is_ours(p)) take(p);
    else __libc_free(p);
}

void *calloc(size_t a, size_t b) {
    return is_guarded(a * b) ? memset(give(16, a * b), 0, a * b) : __libc_calloc(a, b);
}

void *realloc(void *p, size_t n) {
    if (!is_ours(p)) return __libc_realloc(p, n);
    void *q = malloc(n);
    size_t old = ((struct head *)(first_page(p) - PAGE))->size;
    memcpy(q, p, old < n ? old : n);
    free(p);
    return q;
}

void *memalign(size_t a, size_t n) { return is_guarded(n) ? give(a, n) : __libc_memalign(a, n); }

void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }

int posix_memalign(void **p, size_t a, size_t n) {
    *p = memalign(a, n);
    return *p || !n ? 0 : ENOMEM;
}
