/* Runs tilewise's kernels for another process, between unmapped pages, on an emulated Arm.

It first writes the words of struct hello. Then, for each request on its input (struct request, the
path of a shared object, the frame, for each region the number of its pages and their bytes, for
each pointer its struct), it copies the regions between unmapped pages, calls the kernel's entry,
and writes FPCR before and after, the frame and the regions' bytes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { FRAME_WORDS = 48, PARALLEL = 8, WORKER = 10, MOST = 48 };

struct hello { uint64_t hwcap, hwcap2, vector_bytes, page_bytes; };
struct request { int64_t path_bytes, regions, pointers, last_alone; };
struct pointer { int64_t word, region, offset; };
struct region { char *mapped; int64_t pages; };

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);

static int64_t page;

static void get(void *to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) exit(0); /* the other process is gone */
}

static void put(const void *from, size_t bytes) { fwrite(from, 1, bytes, stdout); }

static void fail(const char *why) {
    fprintf(stderr, "emulator: %s\n", why);
    exit(3);
}

static uint64_t control(void) {
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}

/* Instead of GOMP_parallel: the last worker does all tasks. */
static void last_alone(void (*region)(void *), void *frame, unsigned workers, unsigned flags) {
    (void)flags;
    ((int64_t *)frame)[WORKER] = workers - 1;
    region(frame);
}

/* Pages with an unmapped one on either side, filled from the input. */
static struct region receive_region(void) {
    struct region r;
    get(&r.pages, sizeof r.pages);
    size_t bytes = (size_t)((r.pages + 2) * page);
    r.mapped = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r.mapped == MAP_FAILED) fail("no memory");
    get(r.mapped + page, (size_t)(r.pages * page));
    if (mprotect(r.mapped, page, PROT_NONE) ||
        mprotect(r.mapped + (r.pages + 1) * page, page, PROT_NONE)) fail("no unmapped pages");
    return r;
}

static void (*load(const char *path))(void *) {
    static char loaded[4096];
    static void *library;
    if (!library || strcmp(path, loaded)) {
        if (library) dlclose(library);
        library = dlopen(path, RTLD_NOW);
        if (!library) fail(dlerror());
        strcpy(loaded, path);
    }
    return (void (*)(void *))dlsym(library, "entry");
}

static void serve(void) {
    static char path[4096];
    struct request asked;
    int64_t frame[FRAME_WORDS];
    struct region regions[MOST];
    get(&asked, sizeof asked);
    if (asked.path_bytes >= (int64_t)sizeof path || asked.regions > MOST) fail("too much");
    get(path, (size_t)asked.path_bytes);
    path[asked.path_bytes] = 0;
    get(frame, sizeof frame);
    for (int64_t i = 0; i < asked.regions; i++) regions[i] = receive_region();
    for (int64_t i = 0; i < asked.pointers; i++) {
        struct pointer p;
        get(&p, sizeof p);
        frame[p.word] = (int64_t)(regions[p.region].mapped + page + p.offset);
    }
    frame[PARALLEL] = (int64_t)(asked.last_alone ? last_alone : GOMP_parallel);
    void (*entry)(void *) = load(path);
    uint64_t before = control();
    entry(frame);
    uint64_t after = control();
    put(&before, sizeof before);
    put(&after, sizeof after);
    put(frame, sizeof frame);
    for (int64_t i = 0; i < asked.regions; i++) {
        put(regions[i].mapped + page, (size_t)(regions[i].pages * page));
        munmap(regions[i].mapped, (size_t)((regions[i].pages + 2) * page));
    }
    fflush(stdout);
}

int main(void) {
    page = sysconf(_SC_PAGESIZE);
    int length = prctl(PR_SVE_GET_VL);
    struct hello hello = {getauxval(AT_HWCAP), getauxval(AT_HWCAP2),
                          length < 0 ? 0 : (uint64_t)(length & PR_SVE_VL_LEN_MASK), (uint64_t)page};
    put(&hello, sizeof hello);
    fflush(stdout);
    for (;;) serve();
}
