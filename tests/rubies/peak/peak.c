// Runs a command, and prints to standard error its peak memory in kB, which the kernel reports when it has ended. The peak is that of all programs
// that the process ran, so it is at least the memory of the one before the exec: this one is small.
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct rusage usage;
    int status;
    pid_t pid;

    if (argc < 2 || (pid = fork()) < 0)
        return 125;
    if (pid == 0) {
        execv(argv[1], argv + 1);
        _exit(127);
    }
    if (wait4(pid, &status, 0, &usage) != pid)
        return 126;
    fprintf(stderr, "peak %ld\n", usage.ru_maxrss);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 124;
}
