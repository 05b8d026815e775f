"""What PyInstaller adds to a program that imports blockconv: data, the modules' files, and pip's TBB."""

from PyInstaller.utils.hooks import collect_data_files

from blockconv.runtime.threading_layer import tbb_libraries

datas = collect_data_files("blockconv")
module_collection_mode = "pyz+py"  # a digest of the files tells versions of compiled kernels apart
binaries = [(path, "lib") for path in tbb_libraries()[:1]]  # where blockconv looks for it
excludedimports = ["torch"]  # A program that computes with tensors imports it itself, and no other needs its gigabytes.
hiddenimports = ["blockconv.torch"]  # which the attribute imports by its name
