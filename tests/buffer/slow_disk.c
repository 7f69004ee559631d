/* A slow disk, and one that forgets, for tests: loaded before libc into redis-server (LD_PRELOAD).
 *
 * SLOW_DISK_SWITCH  file with the milliseconds that every fsync and fdatasync takes; may change at any time
 * SLOW_DISK_SYNCED  file that gets a line `bytes path` after every sync that has finished: what a power cut leaves
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static long wanted_ms(void) {
    char text[32] = {0};
    const char *path = getenv("SLOW_DISK_SWITCH");
    int fd = path ? open(path, O_RDONLY) : -1;
    if (fd < 0) return 0;
    ssize_t count = read(fd, text, sizeof text - 1);
    close(fd);
    return count > 0 ? atol(text) : 0;
}

static void note(int fd, off_t size) {
    char link[64], path[4096], line[4200];
    const char *synced = getenv("SLOW_DISK_SYNCED");
    int out = synced ? open(synced, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (out < 0) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t count = readlink(link, path, sizeof path - 1);
    if (count > 0) {
        path[count] = 0;
        int length = snprintf(line, sizeof line, "%lld %s\n", (long long)size, path);
        if (write(out, line, length) != length) abort();
    }
    close(out);
}

static int slow(int fd, const char *name) {
    struct stat before;
    int known = fstat(fd, &before) == 0;
    long ms = wanted_ms();
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&rest, NULL);
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int result = real(fd);
    if (result == 0 && known) note(fd, before.st_size);
    return result;
}

int fsync(int fd) { return slow(fd, "fsync"); }
int fdatasync(int fd) { return slow(fd, "fdatasync"); }
