/* Breaks what a store needs of a file system, as some of them do. Preloaded.
 *
 *   BAD_FILES       what to break, as below
 *   BAD_FILES_ROOT  where names are folded; elsewhere they are kept
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int breaks(const char *what) {
    const char *chosen = getenv("BAD_FILES");
    return chosen && !strcmp(chosen, what);
}

static int fail(int error) {
    errno = error;
    return -1;
}

/* Locks: an NFS server without lockd has none; some FUSE systems grant every one. */
#define LOCKING(name)                                                     \
    int name(int fd, int command, ...) {                                  \
        va_list rest;                                                     \
        va_start(rest, command);                                          \
        void *argument = va_arg(rest, void *);                            \
        va_end(rest);                                                     \
        int locks = command == F_OFD_SETLK || command == F_OFD_SETLKW;    \
        if (locks && breaks("no locks")) return fail(ENOLCK);             \
        if (locks && breaks("free locks")) return 0;                      \
        return REAL(name)(fd, command, argument);                         \
    }

LOCKING(fcntl)
LOCKING(fcntl64)

/* Syncs: of a disk that fails, and of one that is overloaded. */
int fsync(int fd) {
    if (breaks("failed syncs")) return fail(EIO);
    if (breaks("slow syncs")) usleep(150000);
    return REAL(fsync)(fd);
}

/* Case is not distinguished. */
static const char *fold(const char *path, char *folded) {
    const char *root = getenv("BAD_FILES_ROOT");
    size_t kept = *path == '/' && root ? strlen(root) : 0;
    if (!breaks("folded names") || (*path == '/' && strncmp(path, root, kept)))
        return path;
    snprintf(folded, PATH_MAX, "%s", path);
    for (size_t i = kept; folded[i]; i++) folded[i] = (char)tolower(folded[i]);
    return folded;
}

/* Renames: of two mounts in one directory, and of a copy in place. */
int rename(const char *from, const char *to) {
    char one[PATH_MAX], other[PATH_MAX], data[4096];
    if (breaks("failed renames")) return fail(EXDEV);
    if (!breaks("copied renames")) return REAL(rename)(fold(from, one), fold(to, other));
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    for (ssize_t n; (n = read(in, data, sizeof data)) > 0;)
        if (write(out, data, (size_t)n) < n) return -1;
    close(in);
    close(out);
    return unlink(from);
}

/* Links: a server resolves them, and its clients see a file. */
#define OPENING(name, parameters, ...)                                    \
    int name parameters {                                                 \
        char folded[PATH_MAX];                                            \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;         \
        va_end(rest);                                                     \
        path = fold(path, folded);                                        \
        if (breaks("followed links")) flags &= ~O_NOFOLLOW;               \
        return REAL(name)(__VA_ARGS__);                                   \
    }

OPENING(open, (const char *path, int flags, ...), path, flags, mode)
OPENING(open64, (const char *path, int flags, ...), path, flags, mode)
OPENING(openat, (int at, const char *path, int flags, ...), at, path, flags, mode)
OPENING(openat64, (int at, const char *path, int flags, ...), at, path, flags, mode)

#define FOLDING(name, parameters, ...)                                    \
    int name parameters {                                                 \
        char folded[PATH_MAX];                                            \
        path = fold(path, folded);                                        \
        return REAL(name)(__VA_ARGS__);                                   \
    }

FOLDING(unlink, (const char *path), path)
FOLDING(unlinkat, (int at, const char *path, int flags), at, path, flags)
FOLDING(stat, (const char *path, struct stat *found), path, found)
FOLDING(stat64, (const char *path, struct stat64 *found), path, found)
FOLDING(lstat, (const char *path, struct stat *found), path, found)
FOLDING(lstat64, (const char *path, struct stat64 *found), path, found)
FOLDING(fstatat, (int at, const char *path, struct stat *found, int flags), at, path,
        found, flags)
FOLDING(fstatat64, (int at, const char *path, struct stat64 *found, int flags), at,
        path, found, flags)

/* The clock of this machine is ahead of the file server's. */
int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && clock == CLOCK_REALTIME && breaks("a clock")) at->tv_sec += 400;
    return failed;
}
