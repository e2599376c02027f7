/* Lets reads and syncs of files hang, as a network file system does.
 *
 * Preloaded into a process. A call for a file NAME does not return while the directory
 * STORESVC_TEST_HANGS holds a file of that name.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void hang(int fd) {
    char link[64], path[PATH_MAX], marker[2 * PATH_MAX];
    const char *markers = getenv("STORESVC_TEST_HANGS");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = markers ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return;
    path[length] = '\0';
    const char *name = strrchr(path, '/');
    if (!name) return;
    snprintf(marker, sizeof marker, "%s%s", markers, name);
    while (!access(marker, F_OK)) usleep(10000);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define HANGING(type, name, parameters, ...) \
    type name parameters {                   \
        hang(fd);                            \
        return REAL(name)(__VA_ARGS__);      \
    }

HANGING(ssize_t, read, (int fd, void *data, size_t size), fd, data, size)
HANGING(ssize_t, pread, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
HANGING(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), fd, data, size,
        at)
HANGING(ssize_t, preadv, (int fd, const struct iovec *data, int count, off_t at), fd,
        data, count, at)
HANGING(ssize_t, preadv64, (int fd, const struct iovec *data, int count, off64_t at), fd,
        data, count, at)
HANGING(ssize_t, preadv2,
        (int fd, const struct iovec *data, int count, off_t at, int flags), fd, data,
        count, at, flags)
HANGING(ssize_t, preadv64v2,
        (int fd, const struct iovec *data, int count, off64_t at, int flags), fd, data,
        count, at, flags)
HANGING(int, fsync, (int fd), fd)
HANGING(int, fdatasync, (int fd), fd)
