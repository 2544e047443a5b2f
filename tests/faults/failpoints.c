/* Faults at the calls with which a process changes the files below one folder.
 *
 * Loaded with LD_PRELOAD, it does nothing until failpoints_attach() names the folder and a file that
 * is mapped as `struct plan`. From then on every such call is counted and its name kept, and the call
 * with the number `at` (with `lasting` set: every one from it on) meets `action`.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_STEPS 4096
#define NAME_BYTES 48

enum action { NONE, KILL, KILL_WITHIN, FAIL, SHORT };

struct plan {
    int64_t at;      /* -1: no call fails */
    int64_t action;  /* enum action */
    int64_t error;   /* errno of FAIL, and of what follows SHORT */
    int64_t lasting; /* also all calls after it */
    int64_t count;   /* calls so far */
    int64_t met;     /* calls that met the action */
    char steps[MOST_STEPS][NAME_BYTES];
};

static struct plan *plan;
static char folder[PATH_MAX];
static size_t folder_bytes;

#define REAL(name, type) \
    static __typeof__(type) real; \
    if (!real) real = (type)dlsym(RTLD_NEXT, #name)

int failpoints_attach(const char *file, const char *below) {
    int descriptor = open(file, O_RDWR | O_CLOEXEC);
    if (descriptor < 0 || !realpath(below, folder)) return errno;
    folder_bytes = strlen(folder);
    void *mapped = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED) return errno;
    plan = mapped;
    return 0;
}

static int is_below(const char *path) {
    return !strncmp(path, folder, folder_bytes) && (path[folder_bytes] == '/' || !path[folder_bytes]);
}

/* Whether a path, relative to a directory's descriptor, is in the folder; `full` gets it whole. */
static int path_is_ours(int directory, const char *path, char *full) {
    if (!plan || !path) return 0;
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
    } else {
        char link[64], base[PATH_MAX];
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        if (snprintf(full, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return is_below(full);
}

static int file_is_ours(int descriptor, char *full) {
    if (!plan) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, full, PATH_MAX - 1);
    if (length < 0) return 0;
    full[length] = 0;
    return is_below(full);
}

/* Count a call and return what it meets; errno is set where it fails. */
static enum action step(const char *name, const char *full) {
    int64_t number = __atomic_fetch_add(&plan->count, 1, __ATOMIC_SEQ_CST);
    if (number < MOST_STEPS) {
        const char *rest = full + folder_bytes;
        snprintf(plan->steps[number], NAME_BYTES, "%s %s", name, *rest ? rest + 1 : ".");
    }
    if (plan->at < 0 || number < plan->at || (number > plan->at && !plan->lasting)) return NONE;
    __atomic_fetch_add(&plan->met, 1, __ATOMIC_SEQ_CST);
    if (plan->action == KILL) kill(getpid(), SIGKILL);
    errno = (int)plan->error;
    if (plan->action == SHORT && number > plan->at) return FAIL;
    return (enum action)plan->action;
}

static void kill_now(void) { kill(getpid(), SIGKILL); }

/* A call that is done whole or fails; KILL_WITHIN ends the process when it is done. */
#define WHOLE(name, ours, full, call, failed) \
    do {                                        \
        if (!(ours)) return call;                 \
        enum action met = step(name, full);       \
        if (met == FAIL || met == SHORT) return failed; \
        __typeof__(call) done = call;             \
        if (met == KILL_WITHIN) kill_now();       \
        return done;                              \
    } while (0)

/* Writes: a part of them is done before SHORT returns and before KILL_WITHIN ends the process. */

static ssize_t one_write(int descriptor, const void *bytes, size_t length, off_t offset, int placed) {
    REAL(pwrite64, ssize_t (*)(int, const void *, size_t, off_t));
    static ssize_t (*plain)(int, const void *, size_t);
    if (!plain) plain = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return placed ? real(descriptor, bytes, length, offset) : plain(descriptor, bytes, length);
}

static ssize_t written(const char *name, int descriptor, const void *bytes, size_t length,
                                             off_t offset, int placed) {
    char full[PATH_MAX];
    if (!file_is_ours(descriptor, full)) return one_write(descriptor, bytes, length, offset, placed);
    enum action met = step(name, full);
    if (met == FAIL) return -1;
    if (met == NONE) return one_write(descriptor, bytes, length, offset, placed);
    if (length < 2 && met == SHORT) return -1;
    ssize_t done = one_write(descriptor, bytes, length / 2, offset, placed);
    if (met == KILL_WITHIN) kill_now();
    return done;
}

static ssize_t written_parts(const char *name, int descriptor, const struct iovec *parts, int count,
                                                         off_t offset, int placed) {
    REAL(pwritev64, ssize_t (*)(int, const struct iovec *, int, off_t));
    static ssize_t (*plain)(int, const struct iovec *, int);
    if (!plain) plain = (ssize_t (*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    char full[PATH_MAX];
    enum action met = file_is_ours(descriptor, full) ? step(name, full) : NONE;
    if (met == FAIL) return -1;
    if (met == NONE) {
        return placed ? real(descriptor, parts, count, offset) : plain(descriptor, parts, count);
    }
    ssize_t done = 0;
    int whole = count / 2;
    for (int part = 0; part <= whole && part < count; part++) {
        size_t length = part < whole ? parts[part].iov_len : parts[part].iov_len / 2;
        ssize_t now = one_write(descriptor, parts[part].iov_base, length, offset + done, placed);
        if (now < 0) return -1;
        done += now;
    }
    if (met == KILL_WITHIN) kill_now();
    return done;
}

ssize_t write(int descriptor, const void *bytes, size_t length) {
    return written("write", descriptor, bytes, length, 0, 0);
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t length, off_t offset) {
    return written("pwrite", descriptor, bytes, length, offset, 1);
}
ssize_t pwrite(int descriptor, const void *bytes, size_t length, off_t offset) {
    return written("pwrite", descriptor, bytes, length, offset, 1);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    return written_parts("writev", descriptor, parts, count, 0, 0);
}
ssize_t pwritev64(int descriptor, const struct iovec *parts, int count, off_t offset) {
    return written_parts("pwritev", descriptor, parts, count, offset, 1);
}
ssize_t pwritev(int descriptor, const struct iovec *parts, int count, off_t offset) {
    return written_parts("pwritev", descriptor, parts, count, offset, 1);
}

/* Everything else that changes a file through its descriptor. */

#define ON_DESCRIPTOR(name, parameters, arguments, failed)           \
    int name parameters {                                              \
        REAL(name, int(*) parameters);                                   \
        char full[PATH_MAX];                                             \
        WHOLE(#name, file_is_ours(descriptor, full), full, real arguments, failed); \
    }

ON_DESCRIPTOR(fsync, (int descriptor), (descriptor), -1)
ON_DESCRIPTOR(fdatasync, (int descriptor), (descriptor), -1)
ON_DESCRIPTOR(ftruncate, (int descriptor, off_t length), (descriptor, length), -1)
ON_DESCRIPTOR(ftruncate64, (int descriptor, off_t length), (descriptor, length), -1)
ON_DESCRIPTOR(fchmod, (int descriptor, mode_t mode), (descriptor, mode), -1)
ON_DESCRIPTOR(fallocate, (int descriptor, int mode, off_t offset, off_t length),
                            (descriptor, mode, offset, length), -1)
ON_DESCRIPTOR(fallocate64, (int descriptor, int mode, off_t offset, off_t length),
                            (descriptor, mode, offset, length), -1)
ON_DESCRIPTOR(posix_fallocate, (int descriptor, off_t offset, off_t length),
                            (descriptor, offset, length), errno)
ON_DESCRIPTOR(posix_fallocate64, (int descriptor, off_t offset, off_t length),
                            (descriptor, offset, length), errno)

/* Names. */

#define ON_PATH(name, parameters, arguments, directory)              \
    int name parameters {                                              \
        REAL(name, int(*) parameters);                                   \
        char full[PATH_MAX];                                             \
        WHOLE(#name, path_is_ours(directory, path, full), full, real arguments, -1); \
    }

ON_PATH(truncate, (const char *path, off_t length), (path, length), AT_FDCWD)
ON_PATH(truncate64, (const char *path, off_t length), (path, length), AT_FDCWD)
ON_PATH(unlink, (const char *path), (path), AT_FDCWD)
ON_PATH(unlinkat, (int directory, const char *path, int flags), (directory, path, flags), directory)
ON_PATH(rmdir, (const char *path), (path), AT_FDCWD)
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD)
ON_PATH(mkdirat, (int directory, const char *path, mode_t mode), (directory, path, mode), directory)
ON_PATH(chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD)
ON_PATH(rename, (const char *path, const char *to), (path, to), AT_FDCWD)
ON_PATH(renameat, (int from, const char *path, int into, const char *to), (from, path, into, to),
                from)
ON_PATH(link, (const char *path, const char *to), (path, to), AT_FDCWD)

/* Opening a file to write to it. */

static int opened(int directory, const char *path, int flags, mode_t mode) {
    REAL(openat64, int (*)(int, const char *, int, ...));
    char full[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
    WHOLE("open", writes && path_is_ours(directory, path, full), full,
                real(directory, path, flags, mode), -1);
}

#define MODE_OF(flags)                                \
    mode_t mode = 0;                                    \
    if (flags & (O_CREAT | __O_TMPFILE)) {              \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        mode = va_arg(rest, mode_t);                      \
        va_end(rest);                                     \
    }

int open(const char *path, int flags, ...) {
    MODE_OF(flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE_OF(flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char *path, int flags, ...) {
    MODE_OF(flags)
    return opened(directory, path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    MODE_OF(flags)
    return opened(directory, path, flags, mode);
}
int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
