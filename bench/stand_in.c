/* Stands in for HAMi-core in bench/real_slices.py where no libvgpu.so is at hand, over the real driver.
 *
 * It shows that gres-mig's part works on a board, and is no limit for users: of all the ways to have memory it counts
 * cuMemAlloc and contexts, and nothing that was not looked up with dlsym() or cuGetProcAddress(). As HAMi-core does, it
 * sets the umask to 0, and all processes with one cache file share one limit. With -DLOSES_COUNT only the first of them
 * is counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int init_t(unsigned);
typedef int memory_t(size_t *, size_t *);
typedef int take_t(uint64_t *, size_t);
typedef int range_t(uint64_t *, size_t *, uint64_t);
typedef int give_t(uint64_t);
typedef int lookup_t(const char *, void **, int, uint64_t);
typedef int lookup_v2_t(const char *, void **, int, uint64_t, int *);

#define SLOTS 256
#define OUT_OF_MEMORY 2
/* On an H200 under driver 580 a context takes 518 MiB. */
#define CONTEXT ((size_t)640 << 20)

static struct slot { pid_t pid; size_t used; } *slots;
static size_t limit;

static void *(*real_dlsym)(void *, const char *);

static void *found(void *handle, const char *name)
{
    const char *versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    for (int i = 0; !real_dlsym && i < 3; i++)
        real_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (!real_dlsym)
        abort();
    return real_dlsym(handle, name);
}

static void *driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    return library ? found(library, name) : NULL;
}

/* This process's place in the file: its own, or that of a process that has ended. */
static struct slot *mine(void)
{
    pid_t pid = getpid();
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].pid == pid)
            return &slots[i];
    for (int i = 0; i < SLOTS; i++) {
        pid_t old = slots[i].pid;
        int gone = old == 0 || (kill(old, 0) && errno == ESRCH);
        if (gone && __sync_bool_compare_and_swap(&slots[i].pid, old, pid)) {
            slots[i].used = CONTEXT;
            return &slots[i];
        }
    }
    abort();
}

static size_t used(void)
{
    size_t sum = 0;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].pid && (kill(slots[i].pid, 0) == 0 || errno != ESRCH))
            sum += slots[i].used;
    return sum;
}

static int init(unsigned flags)
{
    const char *text = getenv("CUDA_DEVICE_MEMORY_LIMIT_0"), *cache = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    if (!slots) {
        int file;
        limit = (size_t)atol(text ? text : "0") << 20;
        umask(0);
        file = open(cache ? cache : "", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0 || ftruncate(file, SLOTS * sizeof *slots))
            exit(1);
        slots = mmap(NULL, SLOTS * sizeof *slots, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (slots == MAP_FAILED)
            exit(1);
        close(file);
    }
    mine();
    return ((init_t *)driver("cuInit"))(flags);
}

static int memory(size_t *left, size_t *total)
{
    int code = ((memory_t *)driver("cuMemGetInfo_v2"))(left, total);
    if (!code && slots && limit) {
        *total = limit;
        *left = used() < limit ? limit - used() : 0;
    }
    return code;
}

static int take(uint64_t *address, size_t size)
{
    int code = OUT_OF_MEMORY;
    if (slots && limit && used() + size > limit)
        return code;
    code = ((take_t *)driver("cuMemAlloc_v2"))(address, size);
#ifdef LOSES_COUNT
    if (slots && mine() != slots)
        return code;
#endif
    if (!code && slots)
        __sync_fetch_and_add(&mine()->used, size);
    return code;
}

static int give(uint64_t address)
{
    uint64_t base;
    size_t size = 0;
    int unknown = ((range_t *)driver("cuMemGetAddressRange_v2"))(&base, &size, address);
    int code = ((give_t *)driver("cuMemFree_v2"))(address);
    if (!code && !unknown && slots)
        __sync_fetch_and_sub(&mine()->used, size);
    return code;
}

static void *ours(const char *name, int version);

static int lookup(const char *name, void **function, int version, uint64_t flags)
{
    int code = ((lookup_t *)driver("cuGetProcAddress"))(name, function, version, flags);
    void *own = ours(name, version);
    if (!code && *function && own)
        *function = own;
    return code;
}

/* Since CUDA 12 it has one parameter more. */
static int lookup_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    int code = ((lookup_v2_t *)driver("cuGetProcAddress_v2"))(name, function, version, flags, status);
    void *own = ours(name, version);
    if (!code && *function && own)
        *function = own;
    return code;
}

static void *ours(const char *name, int version)
{
    struct { const char *name; void *function; } known[] = {
        {"cuInit", (void *)init}, {"cuMemGetInfo_v2", (void *)memory}, {"cuMemAlloc_v2", (void *)take},
        {"cuMemFree_v2", (void *)give}, {"cuGetProcAddress_v2", (void *)lookup_v2},
        /* By these names cuGetProcAddress() gives the newest that the version has. */
        {version ? "cuMemGetInfo" : "", (void *)memory}, {version ? "cuMemAlloc" : "", (void *)take},
        {version ? "cuMemFree" : "", (void *)give},
        {"cuGetProcAddress", version < 12000 ? (void *)lookup : (void *)lookup_v2},
    };
    if (name && strncmp(name, "cu", 2) == 0)
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (strcmp(name, known[i].name) == 0)
                return known[i].function;
    return NULL;
}

void *dlsym(void *handle, const char *name)
{
    void *own = ours(name, 0);
    if (own && found(handle, name))
        return own;
    /* Called last, so that with -O2 RTLD_NEXT goes by our caller's place and not by ours. */
    return found(handle, name);
}
