# Finds a libtorch: the one named by Torch_DIR or CMAKE_PREFIX_PATH (a CMake or an environment variable),
# else the one in the virtual environment that ci/setup makes; for users of the installed library, the
# one it was built with (Libtorch_BUILT_WITH). Torch's own package file insists on a CUDA toolkit whenever torch
# was built with CUDA, even to compile code that has no CUDA in it; this module does not.
#
# Targets
#   Libtorch::cpu   libtorch_cpu and libc10. Programs that link only this start in a third of a second.
#   Libtorch::cuda  the CUDA half on top of it; only where both torch and a CUDA toolkit have CUDA.
# Variables
#   Libtorch_ROOT_DIR  the torch folder (holds include/ and lib/)
#   Libtorch_VERSION   for example 2.11.0; Libtorch_VERSION_MAJOR_MINOR then is 2.11
#   Libtorch_HAS_CUDA  whether this torch was built with CUDA

set(_libtorch_hints)
if(Torch_DIR)
  get_filename_component(_libtorch_from_dir "${Torch_DIR}/../../.." ABSOLUTE)
  list(APPEND _libtorch_hints "${_libtorch_from_dir}")
endif()
file(TO_CMAKE_PATH "$ENV{CMAKE_PREFIX_PATH}" _libtorch_environment)
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH _libtorch_environment)
  list(APPEND _libtorch_hints "${_prefix}" "${_prefix}/torch" "${_prefix}/../..")
endforeach()
file(GLOB _libtorch_venv "${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/torch")
list(APPEND _libtorch_hints ${_libtorch_venv} ${Libtorch_BUILT_WITH})

find_path(Libtorch_ROOT_DIR NAMES include/torch/csrc/api/include/torch/torch.h
          HINTS ${_libtorch_hints} NO_DEFAULT_PATH)
if(Libtorch_ROOT_DIR)
  foreach(_header IN ITEMS torch/headeronly/version.h torch/version.h
                           torch/csrc/api/include/torch/version.h)
    if(EXISTS "${Libtorch_ROOT_DIR}/include/${_header}" AND NOT _libtorch_version)
      file(STRINGS "${Libtorch_ROOT_DIR}/include/${_header}" _libtorch_version
           REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    endif()
  endforeach()
  string(REGEX REPLACE "[^0-9;]" "" _libtorch_numbers "${_libtorch_version}")
  string(REPLACE ";" "." Libtorch_VERSION "${_libtorch_numbers}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" Libtorch_VERSION_MAJOR_MINOR "${Libtorch_VERSION}")
endif()
find_library(Libtorch_CPU_LIBRARY torch_cpu HINTS "${Libtorch_ROOT_DIR}/lib" NO_DEFAULT_PATH)
find_library(Libtorch_C10_LIBRARY c10 HINTS "${Libtorch_ROOT_DIR}/lib" NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Libtorch
  REQUIRED_VARS Libtorch_ROOT_DIR Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE
    "No libtorch was found. Name yours with -DCMAKE_PREFIX_PATH=/path/to/libtorch (or -DTorch_DIR=/path/to/libtorch/share/cmake/Torch). In Shardproof's own folder, ci/setup installs the pinned one into build/venv.")

if(EXISTS "${Libtorch_ROOT_DIR}/lib/libtorch_cuda.so")
  set(Libtorch_HAS_CUDA TRUE)
else()
  set(Libtorch_HAS_CUDA FALSE)
endif()

if(Libtorch_FOUND AND NOT TARGET Libtorch::cpu)
  find_package(Threads REQUIRED)
  add_library(Libtorch::cpu INTERFACE IMPORTED)
  set_target_properties(
    Libtorch::cpu
    PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES
      "${Libtorch_ROOT_DIR}/include;${Libtorch_ROOT_DIR}/include/torch/csrc/api/include"
      INTERFACE_LINK_LIBRARIES "${Libtorch_CPU_LIBRARY};${Libtorch_C10_LIBRARY};Threads::Threads"
      INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D")
  if(Libtorch_HAS_CUDA)
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND)
      add_library(Libtorch::cuda INTERFACE IMPORTED)
      set_target_properties(
        Libtorch::cuda
        PROPERTIES
          INTERFACE_INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}"
          INTERFACE_LINK_LIBRARIES
          "Libtorch::cpu;${Libtorch_ROOT_DIR}/lib/libtorch_cuda.so;${Libtorch_ROOT_DIR}/lib/libc10_cuda.so")
    endif()
  endif()
endif()
