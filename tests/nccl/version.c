// A library that has NCCL's name, and of its functions the one that tells the version.
int ncclGetVersion(int *version);

int ncclGetVersion(int *version) {
    *version = VERSION;
    return 0;
}
