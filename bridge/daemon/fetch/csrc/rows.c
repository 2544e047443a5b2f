/* bridge.daemon.fetch._rows: the C version of `copy_rows` in bridge/daemon/fetch/copy_rows.py.

   A decoded trajectory has one row in each of as many messages as it has tokens. In Python every row
   costs a view, a slice and a copy; in C only the copy. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const int64_t *begins, *counts, *columns;
    Py_ssize_t row_bytes, selected, column_count;
} Plan;

/* Returns the bytes of all columns, -1 if they are not in order or not within a row. */
static Py_ssize_t selected_bytes(const Plan *plan)
{
    Py_ssize_t selected = 0;
    for (Py_ssize_t i = 0; i < plan->column_count; i++) {
        int64_t start = plan->columns[2 * i], stop = plan->columns[2 * i + 1];
        if (start < 0 || stop < start || stop > plan->row_bytes)
            return -1;
        selected += (Py_ssize_t)(stop - start);
    }
    return selected;
}

static char *copy_run(char *at, const char *rows, int64_t count, const Plan *plan)
{
    if (plan->selected == plan->row_bytes && plan->column_count == 1) {
        memcpy(at, rows, (size_t)(count * plan->row_bytes));
        return at + count * plan->row_bytes;
    }
    for (int64_t row = 0; row < count; row++, rows += plan->row_bytes) {
        for (Py_ssize_t i = 0; i < plan->column_count; i++) {
            size_t nbytes = (size_t)(plan->columns[2 * i + 1] - plan->columns[2 * i]);
            memcpy(at, rows + plan->columns[2 * i], nbytes);
            at += nbytes;
        }
    }
    return at;
}

/* Copies one run if it lies in its payload and fits; returns the new end, NULL with an error. */
static char *copy_checked(char *at, const char *end, PyObject *payload, Py_ssize_t i,
                          const Plan *plan)
{
    Py_buffer source;
    int64_t begin = plan->begins[i], count = plan->counts[i];
    if (PyObject_GetBuffer(payload, &source, PyBUF_SIMPLE) < 0)
        return NULL;
    if (begin < 0 || count < 0 || begin > source.len ||
        count > (source.len - begin) / plan->row_bytes)
        PyErr_SetString(PyExc_ValueError, "a run of rows ends beyond its payload");
    else if (plan->selected && count > (end - at) / plan->selected)
        PyErr_SetString(PyExc_ValueError, "the rows do not fit the target");
    else
        at = copy_run(at, (const char *)source.buf + begin, count, plan);
    PyBuffer_Release(&source);
    return PyErr_Occurred() ? NULL : at;
}

static PyObject *copy_all(Py_buffer *target, PyObject *payloads, const Plan *plan)
{
    char *at = target->buf;
    const char *end = at + target->len;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(payloads); i++) {
        at = copy_checked(at, end, PyList_GET_ITEM(payloads, i), i, plan);
        if (at == NULL)
            return NULL;
    }
    return PyLong_FromSsize_t(at - (char *)target->buf);
}

static PyObject *copy_rows(PyObject *module, PyObject *args)
{
    Py_buffer target, begins, counts, columns;
    PyObject *payloads, *copied = NULL;
    Plan plan;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*O!y*y*ny*", &target, &PyList_Type, &payloads, &begins, &counts,
                          &plan.row_bytes, &columns))
        return NULL;
    plan.begins = begins.buf;
    plan.counts = counts.buf;
    plan.columns = columns.buf;
    plan.column_count = columns.len / (Py_ssize_t)(2 * sizeof(int64_t));
    Py_ssize_t runs = PyList_GET_SIZE(payloads) * (Py_ssize_t)sizeof(int64_t);
    if (plan.row_bytes <= 0 || begins.len != runs || counts.len != runs ||
        (plan.selected = selected_bytes(&plan)) < 0)
        PyErr_SetString(PyExc_ValueError, "runs or columns are not those of the payloads' rows");
    else
        copied = copy_all(&target, payloads, &plan);
    PyBuffer_Release(&target);
    PyBuffer_Release(&begins);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&columns);
    return copied;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(target, payloads, begins, counts, row_bytes, columns) -> bytes copied"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModule_Create(&definition);
}
