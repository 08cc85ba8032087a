// oneCCL's all-reduce behind C functions: the only C++ here, as oneCCL has no other interface to memory of the CPU.
#include "ccl_peer.h"

#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include <mpi.h>
#include <oneapi/ccl.hpp>

namespace {

std::unique_ptr<ccl::communicator> communicator;

const std::map<std::string, ccl::datatype> types = {{"float32", ccl::datatype::float32},
                                                    {"float64", ccl::datatype::float64},
                                                    {"int32", ccl::datatype::int32},
                                                    {"int64", ccl::datatype::int64}};
const std::map<std::string, ccl::reduction> operations = {{"sum", ccl::reduction::sum},
                                                          {"min", ccl::reduction::min},
                                                          {"max", ccl::reduction::max},
                                                          {"product", ccl::reduction::prod}};

template <typename Call> void attempt(Call call) {
    try {
        call();
    } catch (const std::exception &error) {
        (void)std::fprintf(stderr, "ccl_peer: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

} // namespace

void ccl_open(int rank, int size) {
    attempt([&] {
        ccl::init();
        ccl::shared_ptr_class<ccl::kvs> kvs;
        ccl::kvs::address_type address;
        if (rank == 0) {
            kvs = ccl::create_main_kvs();
            address = kvs->get_address();
        }
        MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
        if (rank != 0) {
            kvs = ccl::create_kvs(address);
        }
        communicator = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, kvs));
    });
}

void ccl_all_reduce(void *memory, uint64_t count, const char *type, const char *op) {
    attempt([&] { ccl::allreduce(memory, memory, count, types.at(type), operations.at(op), *communicator).wait(); });
}

void ccl_close(void) {
    communicator.reset();
}
