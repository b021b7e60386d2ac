raise ImportError("libfast.so.3: cannot open shared object file:\nno such file")
