//! `break` and `continue` in the value of an argument, which would leave a loop of the expansion.

use proc_macro2::Span;
use syn::{
    Expr, ExprAsync, ExprBreak, ExprClosure, ExprContinue, ExprForLoop, ExprLoop, ExprWhile, Item,
    spanned::Spanned,
    visit_mut::{self, VisitMut},
};

/// Where the expression breaks or continues a loop that is not in it.
pub(crate) fn loose_jump(expr: &Expr) -> Option<Span> {
    let mut jumps = Jumps(None);
    jumps.visit_expr_mut(&mut expr.clone());
    jumps.0
}

struct Jumps(Option<Span>);

impl VisitMut for Jumps {
    fn visit_expr_break_mut(&mut self, jump: &mut ExprBreak) {
        // A label is of the expression itself, or unknown.
        if jump.label.is_none() {
            self.0 = self.0.or(Some(jump.break_token.span()));
        }
        visit_mut::visit_expr_break_mut(self, jump);
    }

    fn visit_expr_continue_mut(&mut self, jump: &mut ExprContinue) {
        if jump.label.is_none() {
            self.0 = self.0.or(Some(jump.continue_token.span()));
        }
    }

    // These have jumps of their own, or none.
    fn visit_expr_loop_mut(&mut self, _: &mut ExprLoop) {}

    fn visit_expr_closure_mut(&mut self, _: &mut ExprClosure) {}

    fn visit_expr_async_mut(&mut self, _: &mut ExprAsync) {}

    fn visit_item_mut(&mut self, _: &mut Item) {}

    fn visit_expr_while_mut(&mut self, each: &mut ExprWhile) {
        self.visit_expr_mut(&mut each.cond);
    }

    fn visit_expr_for_loop_mut(&mut self, each: &mut ExprForLoop) {
        self.visit_expr_mut(&mut each.expr);
    }
}
