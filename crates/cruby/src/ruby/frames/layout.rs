//! Where the structures behind frames hold the parts of a name, in one image.

use gctrace_common::config::StackPath;

use crate::{
    address::Svma,
    ruby::{
        RubyAnalysis, RubyVersion,
        derive::{DataRange, GlobalTable, ShapeList, SymbolTable},
        tables::{self, Struct, Table},
        typed_data::TypedDataLayout,
    },
};

/// How the structures behind frames are read in one image.
#[derive(Clone, Debug)]
pub struct FrameLayout {
    pub(super) iseq: IseqLayout,
    pub(super) method: MethodLayout,
    pub(super) string: StringLayout,
    pub(super) array: ArrayLayout,
    pub(super) class: ClassLayout,
    pub(super) rules: Rules,
    /// The path to the names of C functions, or why it is not known.
    pub(super) symbols: Result<SymbolTable, String>,
    /// Where the table of global variables can be; `None` if that, or the layout of its entries, is not known.
    pub(super) globals: Option<GlobalsLayout>,
    /// Where the table of the instance variables of objects of C code can be; `None` as for `globals`.
    pub(super) other_variables: Option<DataRange>,
    /// A variable of the image; reading it distinguishes an exited process from an invalid pointer.
    pub(super) vm_ptr: Svma,
}

/// Where global variables are, and their layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct GlobalsLayout {
    pub(super) table: GlobalTable,
    /// Byte offset of `trace` in `struct rb_global_variable`.
    pub(super) trace: u32,
}

/// `rb_iseq_t` and the structures it points to; byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct IseqLayout {
    pub(super) body: u32,
    pub(super) kind: u32,
    pub(super) size: u32,
    pub(super) encoded: u32,
    pub(super) pathobj: u32,
    pub(super) base_label: u32,
    pub(super) label: u32,
    pub(super) first_line: u32,
    /// Up to 3.1 the first line is a Fixnum, later an `int`.
    pub(super) first_line_is_fixnum: bool,
    pub(super) infos: u32,
    pub(super) infos_size: u32,
    pub(super) index: u32,
    pub(super) parent: u32,
    pub(super) local: u32,
    /// `builtin_attrs`, for releases whose backtraces depend on it (3.4).
    pub(super) attributes: Option<u32>,
    /// Number of bytes of the body that are read.
    pub(super) span: usize,
    pub(super) info_size: u32,
    pub(super) info_line: u32,
    pub(super) blocks: u32,
    pub(super) block_size: u32,
    pub(super) block_rank: u32,
    pub(super) block_small_ranks: u32,
    pub(super) block_bits: u32,
}

/// `rb_callable_method_entry_t` and `rb_method_definition_t`; byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct MethodLayout {
    pub(super) definition: u32,
    pub(super) owner: u32,
    pub(super) kind: u32,
    pub(super) kind_bits: (u8, u8),
    pub(super) iseq: u32,
    pub(super) block: u32,
    /// The bit that says that the data of a Proc is in its slot.
    pub(super) embedded: u64,
    pub(super) original_id: u32,
    pub(super) definition_span: usize,
}

/// `RString`.
#[derive(Clone, Copy, Debug)]
pub(super) struct StringLayout {
    /// Byte offset of the length of a string that is not embedded.
    pub(super) length: u32,
    /// Byte offset of the pointer to such a string.
    pub(super) pointer: u32,
    /// Byte offset of the length of an embedded string; up to 3.1 it is in the flags.
    pub(super) embedded_length: Option<u32>,
    /// Byte offset of an embedded string.
    pub(super) embedded: u32,
}

/// `RArray`; byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayLayout {
    pub(super) length: u32,
    pub(super) pointer: u32,
    pub(super) embedded: u32,
    /// Mask of the length of an embedded array, applied after the shift.
    pub(super) embedded_mask: u64,
}

/// Where a class holds its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassLayout {
    /// `RUBY_FL_SINGLETON`.
    pub(super) singleton: u64,
    pub(super) path: ClassPath,
    /// Byte offset of the superclass in the class; `None` if unknown.
    pub(super) superclass: Option<u32>,
    /// Where its table of constants is; `None` if unknown.
    pub(super) constants: Option<ConstantsAt>,
    /// Where its own instance variables and class variables are; `None` if unknown.
    pub(super) variables: Option<VariablesAt>,
}

/// Where the instance variables and class variables of a class or module are; byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) enum VariablesAt {
    /// Up to 3.1, in a hash table: the pointer to the extension in the class, and the pointer to the table in the extension.
    Table { extension: u32, table: u32 },
    /// 3.2 to 3.4, in an array: the pointer to it in the class. The shape of the class has their order.
    Shapes { values: u32, list: ShapeList, shape: ShapeLayout },
    /// From 4.0 on, in a separate object: the pointer to it in the extension of the class, and that extension in the class.
    /// The shape of that object has their order. A built-in class has further extensions, one for each box that has changed it
    /// (`RUBY_BOX`): the pointer to their table in the class (`RClass_boxable.box_classext_tbl`, internal/class.h).
    Fields { object: u32, extension: u32, boxes: u32, list: ShapeList, shape: ShapeLayout },
}

/// Where the pointer to a class's table of constants is; byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) enum ConstantsAt {
    /// In the class, since its extension directly follows it (3.2 and later).
    Class(u32),
    /// Up to 3.1: the pointer to the extension in the class, and the pointer to the table in the extension.
    Extension(u32, u32),
}

/// The three generations of class names.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClassPath {
    /// From 3.3 on: members of the class extension, which follows `RClass`; byte offsets from the class.
    Member { path: u32, permanent: u32, permanent_bit: u8, attached: u32, span: usize },
    /// Up to 3.1: hidden instance variables in a hash table; byte offsets of `RClass.ptr` and `rb_classext_t.iv_tbl`.
    Table { extension: u32, variables: u32 },
    /// In 3.2: hidden instance variables in an array, in the order given by the shape of the class; byte offsets of
    /// `rb_classext_t.iv_ptr` from the class and of `rb_vm_t.shape_list`.
    Shapes { variables: u32, list: u32, shape: ShapeLayout },
    /// Unknown: methods are named without their class.
    Unknown,
}

/// `rb_shape_t` (shape.h, 3.2 and later); byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShapeLayout {
    pub(super) size: u32,
    pub(super) name: u32,
    pub(super) next_index: u32,
    /// From 4.0 on it counts fields, including an object id, in two bytes instead of four.
    pub(super) counts_fields: bool,
    pub(super) kind: u32,
    pub(super) parent: u32,
}

/// Which frames a backtrace of the release shows, and how it labels them (`vm_backtrace.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    /// Labels are composed on demand (3.4 and later) instead of when the code is compiled.
    pub(super) composed: bool,
    /// The frame below that of a `rescue` or `ensure` clause is not shown (3.4 and later).
    pub(super) hides_below_clause: bool,
    /// Ruby code that is shown as if it were a C function.
    pub(super) as_c: AsC,
    /// For an instruction that calls no method, the program counter advances only after the instruction (up to 3.2).
    pub(super) counts_behind_leaf_instructions: bool,
    /// `RUBY_FL_PROMOTED`: the flags of an old object (`include/ruby/internal/fl_type.h`; up to 3.2 a two-bit age).
    pub(super) promoted: u64,
}

/// Ruby code that is shown as if it were a C function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AsC {
    /// None (up to 3.3).
    Nothing,
    /// Methods that declare it: `Primitive.attr! :c_trace` (3.4).
    Attribute,
    /// Everything in `<internal:…>`; of adjacent frames the last is shown (4.0 and later).
    Internal,
}

impl Rules {
    fn of(version: RubyVersion) -> Self {
        let at_least = |major, minor| version >= RubyVersion::new(major, minor, 0);
        Self {
            composed: at_least(3, 4),
            hides_below_clause: at_least(3, 4),
            counts_behind_leaf_instructions: !at_least(3, 3),
            promoted: if at_least(3, 3) { 1 << 5 } else { 1 << 5 | 1 << 6 },
            as_c: match () {
                () if at_least(4, 0) => AsC::Internal,
                () if at_least(3, 4) => AsC::Attribute,
                () => AsC::Nothing,
            },
        }
    }
}

impl Rules {
    /// Whether an object with these flags is old: no minor GC frees it, and only a major GC moves it. An object that loses its write barrier
    /// later also stays until the next major GC (`rb_gc_writebarrier_unprotect`, gc.c).
    pub(super) fn is_old(&self, flags: u64) -> bool {
        flags & self.promoted == self.promoted
    }
}

impl FrameLayout {
    /// The layout of an image, from its release's table and from its code; or a text that says why there is none.
    pub fn of(analysis: &RubyAnalysis, table: &Table) -> Result<Self, String> {
        let symbols = analysis.derived.symbols.as_ref().copied().map_err(ToString::to_string);
        let mut layout = Self::with(analysis.version, table, symbols, analysis.vm.vm_ptr)?;
        let shapes = analysis.derived.shapes.as_ref().ok().copied();
        layout.class.variables = layout.class.variables_at(analysis.version, table, shapes);
        let derived = &analysis.derived;
        let others = derived.other_variables.as_ref().ok();
        // From 4.0 on, the slots of these objects hold the pointer to their variables (`RTypedData.fields_obj`).
        let in_table = layout.class.variables.filter(|at| !matches!(at, VariablesAt::Fields { .. }));
        layout.other_variables = others.filter(|_| in_table.is_some()).copied();
        // From 3.0 on, an additional function (`compactor`) precedes it.
        let trace = if analysis.version.at_least(3, 0) { 48 } else { 40 };
        let table = derived.globals.as_ref().ok().filter(|_| reads_tables(analysis.version));
        layout.globals = table.map(|&table| GlobalsLayout { table, trace });
        Ok(layout)
    }

    /// Whether names of classes can be read.
    ///
    /// # Errors
    ///
    /// Why not: without it a class with a name could not be told from one without.
    pub fn names_classes(&self) -> Result<(), String> {
        match (self.class.path, &self.symbols) {
            (ClassPath::Unknown, _) => Err("the members of its classes are not known".to_owned()),
            // Up to 3.2 the name is in a hidden variable, which is found by its name.
            (ClassPath::Table { .. } | ClassPath::Shapes { .. }, Err(reason)) => Err(reason.clone()),
            _ => Ok(()),
        }
    }

    /// The path to a Ruby stack, with the path from a frame to the name of its method added.
    pub(in crate::ruby) fn with_labels(&self, path: StackPath) -> StackPath {
        StackPath {
            iseq_body: self.iseq.body,
            body_base_label: self.iseq.base_label,
            string_pointer: self.string.pointer,
            string_embedded: self.string.embedded,
            ..path
        }
    }

    pub(super) fn with(
        version: RubyVersion,
        table: &Table,
        symbols: Result<SymbolTable, String>,
        vm_ptr: Svma,
    ) -> Result<Self, String> {
        let structure = |tag: &'static str| {
            let known = table.structure(tag);
            known.ok_or_else(|| format!("the layout of `struct {tag}` in CRuby {version} is not known"))
        };
        Ok(Self {
            iseq: IseqLayout::of(version, &structure)?,
            method: MethodLayout::of(version, &structure)?,
            string: StringLayout::of(structure("RString")?)?,
            array: ArrayLayout::of(version, structure("RArray")?)?,
            class: ClassLayout::of(version, table)?,
            rules: Rules::of(version),
            symbols,
            globals: None,
            other_variables: None,
            vm_ptr,
        })
    }
}

/// Whether tables of ids, and the entries of those for constants and global variables, have the layout read here.
fn reads_tables(version: RubyVersion) -> bool {
    version >= RubyVersion::new(2, 7, 0) && version < RubyVersion::new(4, 1, 0)
}

fn offset(structure: &Struct, member: &str) -> Result<u32, String> {
    let missing = || format!("the layout of `struct {}` lacks `{member}`", structure.name);
    structure.field(member).map(|field| field.offset).ok_or_else(missing)
}

fn array(structure: &Struct, member: &str) -> Result<(u32, u32), String> {
    let missing = || format!("the layout of `struct {}` lacks `{member}`", structure.name);
    structure.array(member).map(|array| (array.offset, array.stride)).ok_or_else(missing)
}

/// Number of bytes up to the end of the last of these 8-byte members.
fn span(offsets: &[u32]) -> usize {
    offsets.iter().max().map_or(0, |&last| last as usize + 8)
}

impl IseqLayout {
    fn of<'a>(
        version: RubyVersion,
        structure: &impl Fn(&'static str) -> Result<&'a Struct, String>,
    ) -> Result<Self, String> {
        let iseq = structure("rb_iseq_struct")?;
        let body = structure("rb_iseq_constant_body")?;
        let info = structure("iseq_insn_info_entry")?;
        let index = structure("succ_index_table")?;
        let block = structure("succ_dict_block")?;
        let at = |member| offset(body, member);
        let attributes = match Rules::of(version).as_c {
            AsC::Attribute => Some(at("builtin_attrs")?),
            AsC::Nothing | AsC::Internal => None,
        };
        let first_line = body.field("location.first_lineno");
        let (blocks, block_size) = array(index, "succ_part")?;
        let mut layout = Self {
            body: offset(iseq, "body")?,
            kind: at("type")?,
            size: at("iseq_size")?,
            encoded: at("iseq_encoded")?,
            pathobj: at("location.pathobj")?,
            base_label: at("location.base_label")?,
            label: at("location.label")?,
            first_line: at("location.first_lineno")?,
            first_line_is_fixnum: first_line.is_some_and(|field| field.size == 8),
            infos: at("insns_info.body")?,
            infos_size: at("insns_info.size")?,
            index: at("insns_info.succ_index_table")?,
            parent: at("parent_iseq")?,
            local: at("local_iseq")?,
            attributes,
            span: 0,
            info_size: info.size,
            info_line: offset(info, "line_no")?,
            blocks,
            block_size,
            block_rank: offset(block, "rank")?,
            block_small_ranks: offset(block, "small_block_ranks")?,
            block_bits: array(block, "bits")?.0,
        };
        layout.span =
            span(&[layout.parent, layout.local, layout.index, layout.label, attributes.unwrap_or(0)]);
        Ok(layout)
    }
}

impl MethodLayout {
    fn of<'a>(
        version: RubyVersion,
        structure: &impl Fn(&'static str) -> Result<&'a Struct, String>,
    ) -> Result<Self, String> {
        let entry = structure("rb_callable_method_entry_struct")?;
        let definition = structure("rb_method_definition_struct")?;
        let kind = definition.bit_field("type").ok_or("the layout of method definitions lacks `type`")?;
        let layout = Self {
            definition: offset(entry, "def")?,
            owner: offset(entry, "owner")?,
            kind: kind.offset,
            kind_bits: (kind.first, kind.bits),
            iseq: offset(definition, "body.iseq.iseqptr")?,
            block: offset(definition, "body.bmethod.proc")?,
            embedded: TypedDataLayout::of(version).embedded,
            original_id: offset(definition, "original_id")?,
            definition_span: 0,
        };
        Ok(Self {
            definition_span: span(&[layout.kind, layout.iseq, layout.block, layout.original_id]),
            ..layout
        })
    }
}

impl StringLayout {
    fn of(string: &Struct) -> Result<Self, String> {
        let embedded = array(string, "as.embed.ary").or_else(|_| array(string, "as.ary"))?.0;
        let common = string.field("len").map(|field| field.offset);
        Ok(Self {
            length: common.map_or_else(|| offset(string, "as.heap.len"), Ok)?,
            pointer: offset(string, "as.heap.ptr")?,
            embedded_length: common.or_else(|| string.field("as.embed.len").map(|field| field.offset)),
            embedded,
        })
    }
}

impl ArrayLayout {
    fn of(version: RubyVersion, array_struct: &Struct) -> Result<Self, String> {
        // RARRAY_EMBED_LEN_MASK (include/ruby/internal/core/rarray.h): two bits, from 3.2 on seven.
        let bits = if version >= RubyVersion::new(3, 2, 0) { 7 } else { 2 };
        Ok(Self {
            length: offset(array_struct, "as.heap.len")?,
            pointer: offset(array_struct, "as.heap.ptr")?,
            embedded: array(array_struct, "as.ary")?.0,
            embedded_mask: (1 << bits) - 1,
        })
    }
}

impl ClassLayout {
    fn of(version: RubyVersion, table: &Table) -> Result<Self, String> {
        // RUBY_FL_SINGLETON (include/ruby/internal/fl_type.h) is RUBY_FL_USER0, from 3.4 on RUBY_FL_USER1.
        let singleton = if version >= RubyVersion::new(3, 4, 0) { 1 << 13 } else { 1 << 12 };
        let extension = table.structure("rb_classext_struct");
        let both = table.structure("RClass_and_rb_classext_t");
        let path = match (both, extension) {
            (Some(both), Some(extension)) => {
                let begin = offset(both, "classext.classpath")?
                    .checked_sub(offset(extension, "classpath")?)
                    .ok_or("the layouts of a class and its extension contradict each other")?;
                let permanent = extension
                    .bit_field("permanent_classpath")
                    .ok_or("the layout of classes lacks `permanent`")?;
                let path = offset(both, "classext.classpath")?;
                let attached = begin + offset(extension, "as.singleton_class.attached_object")?;
                let permanent_at = begin + permanent.offset;
                ClassPath::Member {
                    path,
                    permanent: permanent_at,
                    permanent_bit: permanent.first,
                    attached,
                    span: span(&[path, attached]).max(permanent_at as usize + 1),
                }
            }
            (None, Some(extension)) => Self::variables(table, extension)?,
            _ => ClassPath::Unknown,
        };
        let plain = table.structure("RClass").and_then(|class| class.field("super"));
        let superclass = plain.or_else(|| both?.field("classext.super")).map(|field| field.offset);
        Ok(Self { singleton, path, superclass, constants: Self::constants(version, table), variables: None })
    }

    /// The table of constants, for releases whose tables and entries have the layout that `constants.rs` reads.
    fn constants(version: RubyVersion, table: &Table) -> Option<ConstantsAt> {
        if !reads_tables(version) {
            return None;
        }
        let extension = table.structure("rb_classext_struct")?;
        let constants = extension.field("const_tbl")?.offset;
        if let Some(both) = table.structure("RClass_and_rb_classext_t") {
            let begin =
                both.field("classext.classpath")?.offset.checked_sub(extension.field("classpath")?.offset)?;
            return Some(ConstantsAt::Class(begin + constants));
        }
        let class = table.structure("RClass")?;
        Some(match class.field("ptr") {
            Some(pointer) => ConstantsAt::Extension(pointer.offset, constants),
            None => ConstantsAt::Class(class.size + constants),
        })
    }

    /// Instance variables and class variables are in one table (`RCLASS_IV_TBL`, internal/class.h, up to 3.1), from 3.2 to 3.4 in one
    /// array (`RCLASS_IVPTR`), from 4.0 on in one object (`RCLASSEXT_FIELDS_OBJ`, v4.0.0): `rb_cvar_set` stores through
    /// `rb_class_ivar_set` (variable.c).
    fn variables_at(
        &self,
        version: RubyVersion,
        table: &Table,
        shapes: Option<ShapeList>,
    ) -> Option<VariablesAt> {
        if !reads_tables(version) {
            return None;
        }
        if let ClassPath::Table { extension, variables } = self.path {
            return Some(VariablesAt::Table { extension, table: variables });
        }
        // Both are members of the extension.
        let members = table.structure("rb_classext_struct")?;
        let constants = members.field("const_tbl")?.offset;
        let Some(ConstantsAt::Class(at)) = self.constants else { return None };
        let extension = at.checked_sub(constants)?;
        let shape = table.structure("rb_shape").or_else(|| tables::newest_structure(version, "rb_shape"))?;
        let list = shapes.filter(|list| list.size == shape.size)?;
        let shape = ShapeLayout::of(shape).ok()?;
        if shape.counts_fields {
            let object = members.field("fields_obj")?.offset;
            let boxes = table.structure("RClass_and_rb_classext_t")?.size;
            return Some(VariablesAt::Fields { object, extension, boxes, list, shape });
        }
        let values = extension.checked_add(members.field("iv_ptr")?.offset)?;
        Some(VariablesAt::Shapes { values, list, shape })
    }

    /// For releases that hold the name in an instance variable.
    fn variables(table: &Table, extension: &Struct) -> Result<ClassPath, String> {
        let Some(class) = table.structure("RClass") else { return Ok(ClassPath::Unknown) };
        if let Some(variables) = extension.field("iv_tbl") {
            return Ok(ClassPath::Table { extension: offset(class, "ptr")?, variables: variables.offset });
        }
        let list = table.structure("rb_vm_struct").and_then(|vm| vm.field("shape_list"));
        let (Some(variables), Some(list), Some(shape)) =
            (extension.field("iv_ptr"), list, table.structure("rb_shape"))
        else {
            return Ok(ClassPath::Unknown);
        };
        let shape = ShapeLayout::of(shape)?;
        // `RCLASS_EXT_EMBEDDED`: the extension follows the class.
        Ok(ClassPath::Shapes { variables: class.size + variables.offset, list: list.offset, shape })
    }
}

impl ShapeLayout {
    fn of(shape: &Struct) -> Result<Self, String> {
        let fields = shape.field("next_field_index").filter(|field| field.size == 2);
        Ok(Self {
            size: shape.size,
            name: offset(shape, "edge_name")?,
            next_index: fields.map_or_else(|| offset(shape, "next_iv_index"), |field| Ok(field.offset))?,
            counts_fields: fields.is_some(),
            kind: offset(shape, "type")?,
            parent: offset(shape, "parent_id")?,
        })
    }
}
