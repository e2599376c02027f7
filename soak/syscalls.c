/* Counts, logs and breaks the calls by which a process changes files below a root.
 *
 * Preloaded into a server. strace can inject faults too, but counts them for each
 * thread apart; here all threads are counted in one order, one call at a time, so
 * that "the 17th" is one moment, and every moment can be tried.
 *
 *   SOAK_ROOT     what is watched; unset: nothing
 *   SOAK_CONTROL  a file: what to break from now on, in words apart by spaces:
 *                   any word; where it changes, counting begins anew
 *                   kill, or the errno to fail with
 *                   the how maniest call; 0: none
 *                   once, or on: all that follow too
 *                   all, or the kinds that count: create,write,truncate,sync,...
 *   SOAK_LOG      where a line is written for each call: kind, errno, path, offset
 *                 or new path, bytes in hex
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static long counted;

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int is_below(const char *path) {
    const char *root = setting("SOAK_ROOT");
    size_t length = root ? strlen(root) : 0;
    return root && !strncmp(path, root, length) &&
           (path[length] == '/' || path[length] == '\0');
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = '\0';
    return is_below(path);
}

/* Returns the errno to fail with, or 0; does not return where it kills. */
static int fault(const char *kind) {
    static char last[256];
    char text[256] = "", what[16] = "", goes_on[8] = "", kinds[128] = "";
    long number = 0;
    const char *control = setting("SOAK_CONTROL");
    int fd = control ? (int)syscall(SYS_openat, AT_FDCWD, control, O_RDONLY) : -1;
    if (fd < 0) return 0;
    if (syscall(SYS_read, fd, text, sizeof text - 1) < 0) text[0] = '\0';
    syscall(SYS_close, fd);
    if (strcmp(text, last)) {
        strcpy(last, text);
        counted = 0;
    }
    sscanf(text, "%*s %15s %ld %7s %127s", what, &number, goes_on, kinds);
    if (!number || (strcmp(kinds, "all") && !strstr(kinds, kind))) return 0;
    counted++;
    if (counted < number || (counted > number && strcmp(goes_on, "on"))) return 0;
    if (*what == 'k') kill(getpid(), SIGKILL);
    return atoi(what);
}

static void record(const char *kind, int error, const char *path, const char *more,
                   const struct iovec *data, int count, size_t size) {
    const char *file = setting("SOAK_LOG");
    if (!file) return;
    size_t room = strlen(kind) + strlen(path) + strlen(more) + 32 + 2 * size;
    char *line = malloc(room), *end = line;
    end += sprintf(end, "%s\t%d\t%s\t%s\t", kind, error, path, more);
    for (int i = 0; i < count; i++)
        for (size_t j = 0; j < data[i].iov_len && size; j++, size--)
            end += sprintf(end, "%02x", ((unsigned char *)data[i].iov_base)[j]);
    *end++ = '\n';
    int fd = (int)syscall(SYS_openat, AT_FDCWD, file,
                          O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    syscall(SYS_write, fd, line, (size_t)(end - line));
    syscall(SYS_close, fd);
    free(line);
}

/* Makes one call: counted, perhaps broken, logged; nobody else's goes between. */
#define WATCHED(kind, path, more, data, count, size, call)                       \
    pthread_mutex_lock(&one_at_a_time);                                          \
    int error = fault(kind);                                                     \
    long result = error ? -1 : (long)(call);                                     \
    if (result < 0 && !error) error = errno;                                     \
    if (result >= 0) error = 0;                                                  \
    record(kind, error, path, more, data, count, error ? 0 : size);              \
    pthread_mutex_unlock(&one_at_a_time);                                        \
    if (error) errno = error;                                                    \
    return result;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t writev(int fd, const struct iovec *data, int count) {
    char path[PATH_MAX], at[32];
    if (!path_of(fd, path)) return REAL(writev)(fd, data, count);
    snprintf(at, sizeof at, "%ld", (long)lseek(fd, 0, SEEK_CUR));
    WATCHED("write", path, at, data, count, (size_t)result,
            REAL(writev)(fd, data, count))
}

ssize_t write(int fd, const void *bytes, size_t size) {
    char path[PATH_MAX], at[32];
    if (!path_of(fd, path)) return REAL(write)(fd, bytes, size);
    struct iovec data = {(void *)bytes, size};
    snprintf(at, sizeof at, "%ld", (long)lseek(fd, 0, SEEK_CUR));
    WATCHED("write", path, at, &data, 1, (size_t)result, REAL(write)(fd, bytes, size))
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    char path[PATH_MAX], at[32];
    if (!path_of(fd, path)) return REAL(pwrite)(fd, bytes, size, offset);
    struct iovec data = {(void *)bytes, size};
    snprintf(at, sizeof at, "%ld", (long)offset);
    WATCHED("write", path, at, &data, 1, (size_t)result,
            REAL(pwrite)(fd, bytes, size, offset))
}

int ftruncate(int fd, off_t length) {
    char path[PATH_MAX], to[32];
    if (!path_of(fd, path)) return REAL(ftruncate)(fd, length);
    snprintf(to, sizeof to, "%ld", (long)length);
    WATCHED("truncate", path, to, NULL, 0, 0, REAL(ftruncate)(fd, length))
}

int fsync(int fd) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return REAL(fsync)(fd);
    WATCHED("sync", path, "", NULL, 0, 0, REAL(fsync)(fd))
}

int fdatasync(int fd) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return REAL(fdatasync)(fd);
    WATCHED("sync", path, "", NULL, 0, 0, REAL(fdatasync)(fd))
}

int rename(const char *from, const char *to) {
    if (!is_below(to)) return REAL(rename)(from, to);
    WATCHED("rename", from, to, NULL, 0, 0, REAL(rename)(from, to))
}

/* Under both names: Python, built for large files, calls the second. */
#define WATCHED_OPEN(name)                                                       \
    int name(const char *path, int flags, ...) {                                 \
        va_list rest;                                                            \
        va_start(rest, flags);                                                   \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                            \
        int creates = (flags & O_CREAT) && is_below(path) && access(path, F_OK); \
        if (!creates) return REAL(name)(path, flags, mode);                      \
        WATCHED("create", path, "", NULL, 0, 0, REAL(name)(path, flags, mode))   \
    }

WATCHED_OPEN(open)
WATCHED_OPEN(open64)

/* Writes the whole path of a name in a directory; returns whether it is watched. */
static int whole_path(int directory, const char *name, char *whole) {
    char path[PATH_MAX];
    if (*name == '/') {
        snprintf(whole, 2 * PATH_MAX, "%s", name);
    } else if (directory != AT_FDCWD && path_of(directory, path)) {
        snprintf(whole, 2 * PATH_MAX, "%s/%s", path, name);
    } else {
        return 0;
    }
    return is_below(whole);
}

#define WATCHED_OPENAT(name)                                                     \
    int name(int directory, const char *path, int flags, ...) {                  \
        char whole[2 * PATH_MAX];                                                \
        va_list rest;                                                            \
        va_start(rest, flags);                                                   \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                            \
        int creates = (flags & O_CREAT) && whole_path(directory, path, whole) && \
                      access(whole, F_OK);                                       \
        if (!creates) return REAL(name)(directory, path, flags, mode);           \
        WATCHED("create", whole, "", NULL, 0, 0,                                 \
                REAL(name)(directory, path, flags, mode))                        \
    }

WATCHED_OPENAT(openat)
WATCHED_OPENAT(openat64)

int unlink(const char *path) {
    if (!is_below(path)) return REAL(unlink)(path);
    WATCHED("unlink", path, "", NULL, 0, 0, REAL(unlink)(path))
}

int rmdir(const char *path) {
    if (!is_below(path)) return REAL(rmdir)(path);
    WATCHED("rmdir", path, "", NULL, 0, 0, REAL(rmdir)(path))
}

int mkdir(const char *path, mode_t mode) {
    if (!is_below(path)) return REAL(mkdir)(path, mode);
    WATCHED("mkdir", path, "", NULL, 0, 0, REAL(mkdir)(path, mode))
}

int mkdirat(int directory, const char *name, mode_t mode) {
    char whole[2 * PATH_MAX];
    if (!whole_path(directory, name, whole)) return REAL(mkdirat)(directory, name, mode);
    WATCHED("mkdir", whole, "", NULL, 0, 0, REAL(mkdirat)(directory, name, mode))
}

int unlinkat(int directory, const char *name, int flags) {
    char whole[2 * PATH_MAX];
    if (!whole_path(directory, name, whole))
        return REAL(unlinkat)(directory, name, flags);
    WATCHED(flags & AT_REMOVEDIR ? "rmdir" : "unlink", whole, "", NULL, 0, 0,
            REAL(unlinkat)(directory, name, flags))
}
